from mmrl.cli.app import main

if __name__ == "__main__":
    main()
