from mmrl.cli.app import main

main()
